"""What runs on the device: Triton programs, started by the functions one level up."""
