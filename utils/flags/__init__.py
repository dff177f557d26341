"""The flags of the commands: fields of frozen dataclasses, read from command lines and from Python."""
