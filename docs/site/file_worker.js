// Browsers start no Worker for a page that was opened as a file. This one runs the script of the search in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inner = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inner);
          inner.document.head.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.inner.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
