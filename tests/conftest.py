"""What all tests share: the ground's fixtures, and hypothesis without a clock (machines are shared)."""

from hypothesis import settings

pytest_plugins = ["ground.fixtures"]

settings.register_profile("rota", deadline=None)
settings.load_profile("rota")
