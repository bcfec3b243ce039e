-- Add metrics of attempts that workers report.
--
-- KEYS: the buckets.
-- ARGV: the lengths of buckets (see measure.lua), names and values in turn, the name for further names (MessagePack each).
--! include base measure
--! keys lease

measure(decode(ARGV[ARGS]), FIXED + 1, decode(ARGV[ARGS + 1]), decode(ARGV[ARGS + 2]))
return answer(0)
