// bunqueue inside the process, on a SQLite file: `fill COUNT` or `work CONCURRENCY`.
import { Queue, Worker, shutdownManager } from 'bunqueue/client'
import { action, mark, payloads, slots } from './mark.mjs'

const dataPath = './bunqueue.db'

if (action === 'fill') {
  const queue = new Queue('bench', { embedded: true, dataPath })
  const entries = payloads().map(data => ({ name: 'touch', data }))
  for (let start = 0; start < entries.length; start += 1000) {
    await queue.addBulk(entries.slice(start, start + 1000))
  }
  await queue.close()
  shutdownManager()
} else {
  const handler = async () => {
    mark()
    return { ok: true }
  }
  const worker = new Worker('bench', handler, { embedded: true, dataPath, concurrency: slots })
  worker.on('error', error => console.error(error))
}
