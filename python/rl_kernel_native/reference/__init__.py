"""Plain float64 references. A reference defines the result of an operator, not how kernels compute it. References run
only on request."""
