"""Errors of one line, YAML files, bundled configs, and everything that depends on the version of a library."""
