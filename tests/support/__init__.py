"""What tests share: processes that are ready at once, ranks, engines, data planes, moved clocks."""
