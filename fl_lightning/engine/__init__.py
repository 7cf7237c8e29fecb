"""What runs a federated experiment; nothing in it is public."""
