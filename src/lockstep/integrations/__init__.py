"""Other libraries' training loops on the replicas of a strategy. Each is a package that imports its library."""
