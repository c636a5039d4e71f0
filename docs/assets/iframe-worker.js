// A page that is opened from a disk may start no worker. The theme's search then runs in a hidden
// frame of the page, which answers to what the theme calls of a worker.
"use strict"

class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    const inside = frame.contentWindow
    const place = inside.document.body

    const load = source =>
      new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        script.src = source
        script.onload = done
        script.onerror = () => failed(new Error(`${source} can't be loaded`))
        place.append(script)
      })

    inside.importScripts = (...sources) =>
      sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
    inside.postMessage = data => {
      const message = new MessageEvent("message", { data: structuredClone(data) })
      this.dispatchEvent(message)
      if (this.onmessage) this.onmessage(message)
    }
    this.inside = inside
    this.ready = load(url)
  }

  postMessage(data) {
    this.ready.then(() => {
      this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }))
    })
  }

  terminate() {
    this.inside.frameElement.remove()
  }
}

if (location.protocol === "file:") {
  window.IFrameWorker = IFrameWorker // its search finds its files by this name
  window.Worker = IFrameWorker
}
