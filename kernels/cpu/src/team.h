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

// What the threads of one call share: of every phase, which of its work is handed out and how much of it is done. A phase
// ends when its work is done, not when all threads have come by: one that has lost its core (or never got one) holds up
// nobody unless it was in the middle of something. It may come back many phases later, so none reuses another's counters.
struct Shared {
  struct alignas(64) Phase {
    std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };
  explicit Shared(int phases) : phases(phases) {}

  std::vector<Phase> phases;
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

// One thread's view of a parallel call; all threads must go through the same phases.
class Team {
 public:
  Team(int rank, int size, Shared& shared) : rank(rank), size(size), shared_(shared) {}

  // f(i) for every i in [0, count), spread over the team; returns when all are done.
  template <class F>
  void each(int64_t count, int64_t chunk, F&& f) {
    if (phase_ >= shared_.phases.size()) std::abort();  // the call promised fewer
    Shared::Phase& phase = shared_.phases[phase_++];
    int64_t done = 0;
    for (;;) {
      int64_t begin = phase.next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) break;
      int64_t end = begin + chunk < count ? begin + chunk : count;
      for (int64_t i = begin; i < end; ++i) f(i);
      done += end - begin;
    }
    if (size == 1) return;
    if (done) phase.done.fetch_add(done, std::memory_order_acq_rel);
    wait(phase, count);
  }

  // Rows of equal, small work.
  template <class F>
  void each_row(int64_t count, F&& f) {
    each(count, 1 + count / (4 * size), f);
  }

  const int rank;
  const int size;

 private:
  // Spins briefly, as phases are short; then gives the core away, as the missing thread may be waiting for one.
  void wait(const Shared::Phase& phase, int64_t count) const {
    for (int spin = 0; phase.done.load(std::memory_order_acquire) < count; ++spin) {
      if (spin < SPINS) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

  Shared& shared_;
  size_t phase_ = 0;
};

// phases: how many the body has at most.
template <class F>
void parallel(int threads, F&& body, int phases = PHASES) {
  Shared shared(phases);
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
