"""Cost of training and sampling: calculated for other machines, measured on this one."""
