"""The transfer thread of one rank and everything that it drives: the only I/O of a hand-over.

A module imports from its own row and from the rows below it. A test checks it.

| row | P's side | D's side |
|---|---|---|
| the thread | transfer_thread, posted_plans, results | |
| commands, messages | producer | consumer, rendezvous |
| effects | lease_table, outgoing_reads, handover_trace | active_loads, source_reads, lease_keeper, load_reports |
| records, bytes | held_lease, sender, computing_prompts, computed_steps | active_load, receiver, span_read |
| peers | sessions, replies, early_requests, named_prompts | links, link, plane_choice |
| the rank | rank_context, caches, copies, checksums, deadlines | |
"""
