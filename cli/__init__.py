"""The command ``kvferry``: doctor, top, drain, bench, plan, keygen."""
