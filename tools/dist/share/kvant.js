#!/usr/bin/env node
// Starts the program of this platform's package.
'use strict';

const { spawn } = require('node:child_process');

const name = `@kvant/${process.platform}-${process.arch}`;
let program;
try {
  program = require.resolve(`${name}/bin/kvant${process.platform === 'win32' ? '.exe' : ''}`);
} catch {
  const libc = process.platform === 'linux' && !process.report.getReport().header.glibcVersionRuntime ? ' with musl' : '';
  console.error(`kvant: no program for ${process.platform} ${process.arch}${libc}: the package ${name} is not installed. ` +
    'If it exists, install again without --omit=optional; or build from source: cargo install kvant-cli');
  process.exit(1);
}

const child = spawn(program, process.argv.slice(2), { stdio: 'inherit' });
// A terminal sends Ctrl-C to both; other signals reach this process alone.
process.on('SIGINT', () => {});
for (const signal of ['SIGTERM', 'SIGHUP']) process.on(signal, () => child.kill(signal));
child.on('error', error => {
  console.error(`kvant: ${program}: ${error.message}`);
  process.exit(1);
});
child.on('exit', (code, signal) => {
  if (signal) {
    process.removeAllListeners(signal);
    process.kill(process.pid, signal);
  } else process.exit(code);
});
