"""``kvferry doctor``: whether this machine can run KVFerry, what is missing, and what to do about it. A section is a
function that returns findings; none of them changes the machine, or makes a key."""
