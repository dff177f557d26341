"""Whatever `--weights` names, opened: what it is, what sizes it takes, and the objects that it finds."""
