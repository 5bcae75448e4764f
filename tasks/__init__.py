"""The tasks: one file each. Text (and pictures) in, text out."""
