"""Who takes part: what the environment says about a job of several workers. The only room that reads it."""
