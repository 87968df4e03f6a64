"""The command line: click commands and rich rendering, no engine logic."""
