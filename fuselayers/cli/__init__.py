"""The command `fuselayers`: one file or folder per command; `fuselayers.cli.main.main` reads the arguments."""
