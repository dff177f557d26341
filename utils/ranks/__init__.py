"""Ranks of a distributed job: start, collectives, failures, signals. The only package that uses torch.distributed."""
