"""Ids of objects over the frames of a video or stream."""
