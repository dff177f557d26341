"""One job of many processes. Imports utils/machine and the ground floor; torch.distributed is used here alone."""
