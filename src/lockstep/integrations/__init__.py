"""Front ends of other libraries on the engine, each imported on demand; ``import lockstep`` needs none of them."""
