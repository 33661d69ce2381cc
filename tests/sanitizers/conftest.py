"""These tests mean something in a process with the sanitized extension: tests/test_sanitizers.py gives them one."""

import os

collect_ignore_glob = [] if os.environ.get("ZEROX_TEST_EXTENSION") else ["test_*.py"]
