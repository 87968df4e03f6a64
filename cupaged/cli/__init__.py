"""The `cupaged` command: click commands, loaded only when called, and rich output; no engine logic."""
