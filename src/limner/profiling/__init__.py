"""What training and drawing cost: planned for other machines, measured on this one."""
