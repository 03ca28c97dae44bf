// Threads of one call. Work is handed out in chunks from a shared counter, not split evenly: other processes run on the
// same cores, and a thread that loses its core for a while must not hold up the rest.
//
// OpenMP, from the library torch already loaded: both share one pool, so there is never a second set of threads
// spinning on the same cores.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#if defined(__AMX_TILE__)
#include <immintrin.h>
#endif

namespace headrace {

constexpr int SPINS = 2000;
// Of a call that does not say how many it has.
constexpr int PHASES = 32;
// Rows of a part, at least: each part's threads read all weights.
constexpr int64_t PART_ROWS = 128;
constexpr int MAX_PARTS = 8;

// Work cut into ranges that threads have a home in. They begin there, phase after phase, so what a core has written stays
// where it is read next: of a prompt's activations, half would lie in another core's cache otherwise. Who has done
// what is at home helps elsewhere.
struct Parts {
  int count = 1;
  int64_t bounds[MAX_PARTS + 1] = {};

  int64_t end() const { return bounds[count]; }
  // Of the part that holds item i.
  int find(int64_t i) const {
    int part = 0;
    while (part + 1 < count && i >= bounds[part + 1]) ++part;
    return part;
  }
};

inline int most_parts(int threads) { return threads < 1 ? 1 : threads < MAX_PARTS ? threads : MAX_PARTS; }

// All that handle the same rows, whatever they do with them, must cut them alike: here.
inline Parts cut_rows(int64_t rows, int threads) {
  Parts parts;
  const int64_t most = most_parts(threads), full = rows / PART_ROWS;
  parts.count = int(full < 1 ? 1 : full < most ? full : most);
  // At multiples of 32, as many rows as tiles of the matrix kernels have.
  for (int i = 1; i < parts.count; ++i) parts.bounds[i] = (i * rows / parts.count + 31) / 32 * 32;
  parts.bounds[parts.count] = rows;
  return parts;
}

// What the threads of one call share: of every phase, which of its work is handed out and how much of it is done. A phase
// ends when its work is done, not when all threads have come by: one that has lost its core (or never got one) holds up
// nobody unless it was in the middle of something. It may come back many phases later, so none reuses another's counters.
class Shared {
 public:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  Shared(int phases, int parts) : phases(phases), parts(parts), counters_(size_t(phases) * (parts + 1)) {}

  Counter& done(int phase) { return counters_[size_t(phase) * (parts + 1)]; }
  Counter& next(int phase, int part) { return counters_[size_t(phase) * (parts + 1) + 1 + part]; }

  const int phases;
  const int parts;  // of a phase, at most

 private:
  std::vector<Counter> counters_;
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

#if defined(__AMX_TILE__)
// Palette 1, all eight tiles 16 rows of 64 bytes: operands are padded to that. A constant, because GCC does not know
// that loading it reads more than its first bytes, and would drop stores to a local.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64}, reserved_bytes[8] = {};
  uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16}, reserved_rows[8] = {};
};
inline constexpr TileConfig TILE_CONFIG;
#endif

// State of a thread inside a parallel call: tiles configured, and denormals flushed by vectors as they are by tiles, so
// that it does not show which of them computed something.
class Numerics {
 public:
#if defined(__AMX_TILE__)
  Numerics() : control_(_mm_getcsr()) {
    constexpr unsigned FLUSH = 0x8040;
    _mm_setcsr(control_ | FLUSH);
    _tile_loadconfig(&TILE_CONFIG);
  }
  ~Numerics() {
    _tile_release();
    _mm_setcsr(control_);
  }

 private:
  const unsigned control_;
#else
  Numerics() {}
  ~Numerics() {}
#endif
};

// Whether this thread shares its core with programs that wait until it is offered to them. A program started as SCHED_BATCH
// is one of those (headrace/serve.py): they take no core from a thread that runs, in the middle of a task that the others
// wait for. Threads that compute leave that class.
inline bool yields_core() {
#if defined(SCHED_BATCH)
  static thread_local const bool yields = [] {
    if (sched_getscheduler(0) != SCHED_BATCH) return false;
    const sched_param normal = {};
    return sched_setscheduler(0, SCHED_OTHER, &normal) == 0;
  }();
  return yields;
#else
  return false;
#endif
}

// One thread's view of a parallel call; all threads must go through the same phases.
class Team {
 public:
  Team(int rank, int size, Shared& shared) : rank(rank), size(size), shared_(shared) {}

  // f(i) for every i of the parts, spread over the team; returns when all are done.
  template <class F>
  void each(const Parts& parts, int64_t chunk, F&& f) {
    if (phase_ >= shared_.phases || parts.count > shared_.parts) std::abort();  // the call promised fewer
    const int phase = phase_++, home = rank * parts.count / size;
    if (offers_) sched_yield();
    int64_t done = 0;
    for (int turn = 0; turn < parts.count; ++turn) {
      const int part = (home + turn) % parts.count;
      std::atomic<int64_t>& next = shared_.next(phase, part).value;
      const int64_t first = parts.bounds[part], last = parts.bounds[part + 1];
      for (;;) {
        const int64_t begin = first + next.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= last) break;
        const int64_t end = begin + chunk < last ? begin + chunk : last;
        for (int64_t i = begin; i < end; ++i) f(i);
        done += end - begin;
      }
    }
    if (size == 1) return;
    std::atomic<int64_t>& all = shared_.done(phase).value;
    if (done) all.fetch_add(done, std::memory_order_acq_rel);
    wait(all, parts.end());
  }

  // The same for every i in [0, count), where nothing was done before that belongs to i.
  template <class F>
  void each(int64_t count, int64_t chunk, F&& f) {
    Parts parts;
    parts.bounds[1] = count;
    each(parts, chunk, f);
  }

  // Rows of equal, small work.
  template <class F>
  void each_row(int64_t count, F&& f) {
    each(cut_rows(count, shared_.parts), 1 + count / (4 * size), f);
  }

  // How everything in this call cuts so many rows.
  Parts cut(int64_t rows) const { return cut_rows(rows, shared_.parts); }

  // From now on others may have this thread's core at the beginning of each phase.
  void offer_core() { offers_ = yields_core(); }

  const int rank;
  const int size;

 private:
  // Spins briefly, as phases are short; then gives the core away, as the missing thread may be waiting for one.
  static void wait(const std::atomic<int64_t>& done, int64_t count) {
    for (int spin = 0; done.load(std::memory_order_acquire) < count; ++spin) {
      if (spin < SPINS) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

  Shared& shared_;
  int phase_ = 0;
  bool offers_ = false;
};

// phases: how many the body has at most.
template <class F>
void parallel(int threads, F&& body, int phases = PHASES) {
  Shared shared(phases, most_parts(threads));
  if (threads <= 1) {
    const Numerics numerics;
    body(Team(0, 1, shared));
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const Numerics numerics;
    // The runtime may grant fewer threads than asked for.
    body(Team(omp_get_thread_num(), omp_get_num_threads(), shared));
  }
}

}  // namespace headrace
