"""The algebra of a round: methods, server and client states, updates and their exact sums, cohorts and seeds."""
