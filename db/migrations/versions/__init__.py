"""One file per migration, numbered: 0001_initial.py, 0002_….py."""
