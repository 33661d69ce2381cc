"""A process that has the fake accelerator is no longer one in which other tests mean what they say: torch then takes it
for the machine's accelerator. tests/test_accelerator.py gives these tests a process of their own.
"""

import os

collect_ignore_glob = [] if os.environ.get("ZEROX_TEST_DEVICE") == "fake" else ["test_*.py"]
