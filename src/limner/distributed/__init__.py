"""Training on several processes: strategies for `training.parallel.Parallel` on torch.distributed."""
