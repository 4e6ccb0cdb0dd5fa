"""The commands of `flashrl`, one file each: its arguments, and what it prints."""
