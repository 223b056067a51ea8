"""The bootstrap page: how D and routers that know P by one HTTP address find the control ports of its ranks."""
