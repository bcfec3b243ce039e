-- Add what a worker tells of runs. Arguments: the lengths of buckets (see `measure`), a name and its values in turn, the
-- name of the bucket of names above the most (MessagePack each). Keys: of the buckets.
--! include base measure
--! keys lease

measure(decode(ARGV[ARGS]), FIXED + 1, decode(ARGV[ARGS + 1]), decode(ARGV[ARGS + 2]))
return answer(0)
