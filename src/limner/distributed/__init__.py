"""Many processes that train one model: strategies for `training.parallel.Parallel` on torch.distributed."""
