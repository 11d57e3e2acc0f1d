"""What is tuned for replicas on a CPU: linear layers through oneDNN, the C allocator, the caller's OpenMP threads."""
