"""A soak: engines of P and D that live long, beside others that are killed, stopped and started again."""
