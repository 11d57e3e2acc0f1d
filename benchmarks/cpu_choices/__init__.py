"""What replicas of a CPU gain or lose by choices that the engine makes otherwise."""
