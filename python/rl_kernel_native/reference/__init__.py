"""Plain float64 references. A reference defines the result of an operator, but not the order in which kernels compute
it. Operators never call references; a reference runs only if a caller asks for it."""
