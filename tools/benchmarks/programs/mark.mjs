// The mark that each handler leaves, and the payload of each job, for peers in JavaScript.
import { openSync, writeSync } from 'node:fs'

const marks = openSync(process.env.BENCH_MARKS, 'a')

export function mark () {
  writeSync(marks, 'x')
}

export const [, , action, number] = process.argv
export const slots = Number(number)
export const connection = { host: '127.0.0.1', port: Number(process.env.BENCH_PORT) }

export function payloads () {
  return Array.from({ length: Number(number) }, (_, n) => ({ n, user: `user-${n}`, text: 'x'.repeat(100) }))
}
