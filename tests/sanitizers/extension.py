"""Takes the extension at $ZEROX_TEST_EXTENSION for zerox._C. A pytest plugin: -p tests.sanitizers.extension"""

import importlib.util
import os
import sys

import torch  # noqa: F401  (the library is linked against it)

spec = importlib.util.spec_from_file_location("zerox._C", os.environ["ZEROX_TEST_EXTENSION"])
assert spec is not None
assert spec.loader is not None
assert "zerox" not in sys.modules, "too late"
sys.modules["zerox._C"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["zerox._C"])
