"""A dataset's labels in another format: exact numbers in, exact numbers out; pictures are linked."""
