"""Update rules as data: the state and the options of each, and the numbers that kernels read of a param group."""
