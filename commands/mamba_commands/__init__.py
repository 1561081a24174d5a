"""The command line: one file a command, each parses, calls the library and prints."""
