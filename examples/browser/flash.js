/* ../flash.c in a thread of the browser. A message has the words of a call, and the answer what it wrote; the first has
   also the program, compiled, and its files, a Blob under each name. Between calls the model and the state stay. */
let main, memory, files, words, written, file;  // what went to 1, the output, to 2, the errors, and to 4, the open file
const FINE = 0, NOT_OPEN = 8, NO_SUCH_FILE = 44;
const bytes = (at, n) => new Uint8Array(memory.buffer, at, n);
const numbers = (at, n) => new Uint32Array(memory.buffer, at, n);
const put = (at, ...values) => (numbers(at, values.length).set(values), FINE);
const pieces = (list, n) => Array.from({ length: n }, (_, i) => bytes(...numbers(list + 8 * i, 2)));

/* What the program asks of its system, in the terms of WASI. It opens one file at a time, in the folder 3. */
const system = {
  args_sizes_get: (count, size) => put(count, words.length) || put(size, words.reduce((n, word) => n + word.length, 0)),
  args_get(at, to) {
    for (const word of words) put(at, to), bytes(to, word.length).set(word), at += 4, to += word.length;
    return FINE;
  },
  fd_prestat_get: (fd, to) => fd === 3 ? put(to, 0, 1) : NOT_OPEN,
  fd_prestat_dir_name: (fd, to) => (bytes(to, 1)[0] = "/".charCodeAt(), FINE),
  fd_fdstat_get: (fd, to) => put(to, fd === 3 ? 3 : 4, 0, -1, -1, -1, -1),  // a folder or a file, with all rights
  path_open(folder, follow, path, n, how, rights, inherited, flags, to) {
    file = { at: 0, blob: files[new TextDecoder().decode(bytes(path, n))] }, written[4] = [];
    return file.blob || how & 1 ? put(to, 4) : NO_SUCH_FILE;
  },
  fd_seek: (fd, offset, from, to) => put(to, file.at = [0, file.at, file.blob.size][from] + Number(offset), 0),
  fd_read(fd, list, n, to) {
    const begin = file.at;
    for (const piece of pieces(list, n)) {
      const part = new FileReaderSync().readAsArrayBuffer(file.blob.slice(file.at, file.at + piece.length));
      piece.set(new Uint8Array(part)), file.at += part.byteLength;
    }
    return put(to, file.at - begin);
  },
  fd_write(fd, list, n, to) {
    const blob = new Blob(pieces(list, n));
    return written[fd].push(blob) && put(to, blob.size);
  },
  fd_fdstat_set_flags: () => FINE, fd_close: () => FINE,
  proc_exit() { throw "the program ended"; }
};

onmessage = async ({ data }) => {
  words = ["flash", "", ...data.words].map(word => new TextEncoder().encode(word + "\0"));
  written = [[], [], [], [], []];
  try {
    if (data.program) {
      const { exports } = await WebAssembly.instantiate(data.program, { wasi_snapshot_preview1: system });
      files = data.files, memory = exports.memory, main = exports.__main_void, exports._initialize();
    }
    main();
    const tokens = written[1].slice(0, -1);  // the last of what was written is the end of the line
    postMessage({ text: await new Blob(tokens).arrayBuffer(), n: tokens.length, state: new Blob(written[4]) });
  } catch (error) {
    postMessage({ error: await new Blob(written[2]).text() || String(error) });
    if (data.program) close();
  }
};
