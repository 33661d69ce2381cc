"""Hypothesis, for all tests. No deadlines: they measure the machine, not the code.

"ci", the default, draws the same examples in every run; "search" draws new ones, and many; "sanitized" is for
tests/test_sanitizers.py.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=800)
settings.register_profile("sanitized", settings.get_profile("ci"), max_examples=12)
settings.load_profile("ci")
