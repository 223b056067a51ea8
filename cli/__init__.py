"""The command ``kvferry``: router, doctor, check, drain, bench, plan, keygen."""
