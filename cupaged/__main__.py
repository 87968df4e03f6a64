"""The `cupaged` command, and `python -m cupaged`."""

import sys

try:
    from cupaged.cli.main import main as main
except KeyboardInterrupt:  # Ctrl-C so early that the command line, which knows what it means, is not there yet
    sys.exit(130)

if __name__ == "__main__":
    main()
