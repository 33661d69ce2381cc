"""Operators that torchvision may lack."""

import clients.torchvision_ops  # noqa: F401
