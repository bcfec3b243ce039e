// The mark that each handler leaves, and the payload of each job, for peers in JavaScript.
import { openSync, statSync, writeSync } from 'node:fs'
import { setTimeout } from 'node:timers/promises'

const path = process.env.BENCH_MARKS
const marks = openSync(path, 'a')

export function mark () {
  writeSync(marks, 'x')
}

// The seconds of a clock that all processes share.
export function now () {
  return Number(process.hrtime.bigint()) / 1e9
}

// Leave the seconds since a time as a mark of eight bytes.
export function markTime (at) {
  writeSync(marks, Buffer.from(Float64Array.of(now() - at).buffer))
}

export const [, , action, number] = process.argv
export const slots = Number(number)
export const connection = { host: '127.0.0.1', port: Number(process.env.BENCH_PORT) }

// Enqueue jobs that leave the time until they ran, each on an idle queue.
export async function pickup (enqueue) {
  for (let count = 1; count <= slots; count++) {
    await enqueue({ at: now() })
    while (statSync(path).size < 8 * count) await setTimeout(1)
    await setTimeout(100 + 100 * Math.random())
  }
}

export function payloads () {
  const start = now()
  process.on('exit', () => console.log(`filled in ${now() - start} seconds`))
  return Array.from({ length: Number(number) }, (_, n) => ({ n, user: `user-${n}`, text: 'x'.repeat(100) }))
}
