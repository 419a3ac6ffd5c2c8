// Runs a kernel: the threads of a block one after another on one stack, until one waits at a barrier; then the others go
// on, each on a stack of its own. A kernel without barriers so costs no switch at all.
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include <vector>

struct dim3_t { unsigned int x, y, z; };
#define LOCAL __attribute__((tls_model("initial-exec"))) thread_local
extern "C" { LOCAL dim3_t threadIdx, blockIdx, blockDim, gridDim; }

namespace {

const size_t STACK = 256 << 10;
enum State { READY, AT_BLOCK, AT_WARP, FREE };

#if defined(__x86_64__)
struct Context { void* sp; };
extern "C" void switch_stack(void** from, void* to);
__asm__(
    ".text\n.globl switch_stack\n.hidden switch_stack\nswitch_stack:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
void start_context(Context& c, char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK);
    *--top = 0;
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) *--top = 0;
    c.sp = top;
}
void change(Context& from, Context& to) { switch_stack(&from.sp, to.sp); }
#else
struct Context { ucontext_t c; };
void start_context(Context& c, char* stack, void (*entry)()) {
    getcontext(&c.c);
    c.c.uc_stack.ss_sp = stack;
    c.c.uc_stack.ss_size = STACK;
    c.c.uc_link = 0;
    makecontext(&c.c, entry, 0);
}
void change(Context& from, Context& to) { swapcontext(&from.c, &to.c); }
#endif

struct Fiber {
    Context context;
    char* stack;
    State state;
    unsigned thread;
    unsigned mask;
    int line;
};

struct Block {
    void (*call)(void*, void**);
    void** parameters;
    unsigned threads, next, finished, warps;
    int order;
    unsigned seed;
    std::vector<Fiber*> fibers;
    std::vector<unsigned> sequence;
    std::vector<unsigned> shuffles;
    std::vector<unsigned long long> slots;
    Context scheduler;
    Fiber* running;
    char* dynamic;
    char* message;
    size_t room;
    bool failed;
    ~Block() {
        for (Fiber* f : fibers) { munmap(f->stack, STACK); delete f; }
    }
};

thread_local Block block;

void place(unsigned t) {
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

void work() {
    for (;;) {
        Block& b = block;
        while (b.next < b.threads) {
            unsigned t = b.sequence[b.next++];
            b.running->thread = t;
            place(t);
            b.call(0, b.parameters);
            b.finished++;
        }
        b.running->state = FREE;
        change(b.running->context, b.scheduler);
    }
}

void resume(Fiber* f) {
    block.running = f;
    f->state = READY;
    place(f->thread);
    change(block.scheduler, f->context);
}

Fiber* free_fiber(size_t index) {
    Block& b = block;
    if (index == b.fibers.size()) {
        Fiber* f = new Fiber;
        f->stack = (char*)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        b.fibers.push_back(f);
    }
    Fiber* f = b.fibers[index];
    start_context(f->context, f->stack, work);
    f->state = READY;
    return f;
}

bool fail(const char* text, unsigned thread, int line) {
    Block& b = block;
    snprintf(b.message, b.room, "%s (block %u,%u,%u; thread %u; line %d)", text, blockIdx.x, blockIdx.y, blockIdx.z, thread,
             line);
    b.failed = true;
    return false;
}

void arrange(unsigned turn) {
    Block& b = block;
    for (unsigned i = 0; i < b.threads; ++i) b.sequence[i] = b.order == 1 ? b.threads - 1 - i : i;
    if (b.order == 2) {
        unsigned long long x = b.seed * 2654435761ull + turn * 40503ull + 88172645463325252ull;
        for (unsigned i = b.threads; i > 1; --i) {
            x ^= x << 13; x ^= x >> 7; x ^= x << 17;
            unsigned j = x % i, held = b.sequence[i - 1];
            b.sequence[i - 1] = b.sequence[j];
            b.sequence[j] = held;
        }
    }
}

bool release_warps(std::vector<Fiber*>& waiting) {
    Block& b = block;
    bool any = false;
    std::vector<std::vector<Fiber*>> warps(b.warps);
    for (Fiber* f : waiting) if (f->state == AT_WARP) warps[f->thread / 32].push_back(f);
    for (unsigned w = 0; w < b.warps; ++w) {
        if (warps[w].empty()) continue;
        unsigned there = 0, full = b.threads - w * 32 >= 32 ? ~0u : (1u << (b.threads - w * 32)) - 1;
        for (Fiber* f : warps[w]) there |= 1u << (f->thread % 32);
        for (Fiber* f : warps[w]) {
            unsigned wanted = f->mask & full;
            if ((f->mask >> (f->thread % 32) & 1) == 0) return fail("a thread is not in the mask of its own warp operation", f->thread, f->line);
            if (wanted & ~there) continue;
            unsigned same = 0;
            for (Fiber* g : warps[w]) if (g->mask == f->mask && g->line == f->line && g->state == AT_WARP) same |= 1u << (g->thread % 32);
            if ((same & wanted) != wanted) continue;
            for (Fiber* g : warps[w]) if (wanted >> (g->thread % 32) & 1) g->state = READY;
            any = true;
        }
    }
    return any;
}

bool run_one_block() {
    Block& b = block;
    b.next = b.finished = 0;
    b.failed = false;
    arrange(0);
    std::vector<Fiber*> waiting;
    while (b.next < b.threads) {
        Fiber* f = free_fiber(waiting.size());
        resume(f);
        if (f->state != FREE) waiting.push_back(f);
    }
    for (unsigned turn = 1; !waiting.empty(); ++turn) {
        bool released = release_warps(waiting);
        if (b.failed) return false;
        if (!released) {
            for (Fiber* f : waiting)
                if (f->state == AT_WARP)
                    return fail("a warp operation waits for threads of its mask that left or are elsewhere", f->thread, f->line);
            if (b.finished) return fail("a thread waits in __syncthreads() that others of its block left without", waiting[0]->thread, waiting[0]->line);
            for (Fiber* f : waiting) {
                if (f->line != waiting[0]->line) return fail("threads of one block wait in different __syncthreads()", f->thread, f->line);
                f->state = READY;
            }
        }
        arrange(turn);
        std::vector<Fiber*> of_thread(b.threads, nullptr), left;
        for (Fiber* f : waiting) of_thread[f->thread] = f;
        std::vector<unsigned> now = b.sequence;
        for (unsigned t : now) {
            Fiber* f = of_thread[t];
            if (!f) continue;
            if (f->state == READY) resume(f);
            if (f->state != FREE) left.push_back(f);
        }
        waiting = left;
    }
    return true;
}

struct Found { const void* address; size_t module, size; };
int find_library(dl_phdr_info* info, size_t, void* data) {
    Found* found = (Found*)data;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& h = info->dlpi_phdr[i];
        const char* begin = (const char*)info->dlpi_addr + h.p_vaddr;
        if (h.p_type == PT_LOAD && begin <= (const char*)found->address && (const char*)found->address < begin + h.p_memsz) {
            for (int j = 0; j < info->dlpi_phnum; ++j)
                if (info->dlpi_phdr[j].p_type == PT_TLS) {
                    found->module = info->dlpi_tls_modid;
                    found->size = info->dlpi_phdr[j].p_memsz;
                }
            return 1;
        }
    }
    return 0;
}
struct tls_index { unsigned long module, offset; };
extern "C" void* __tls_get_addr(tls_index*);

}  // namespace

extern "C" {

void emulated_syncthreads(int line) {
    Fiber* f = block.running;
    f->state = AT_BLOCK;
    f->line = line;
    change(f->context, block.scheduler);
}

void emulated_syncwarp(unsigned mask, int line) {
    Fiber* f = block.running;
    f->state = AT_WARP;
    f->mask = mask;
    f->line = line;
    change(f->context, block.scheduler);
}

unsigned long long* emulated_slots() {
    // Two sets of slots in turn, so that a thread that is ahead does not overwrite what another is yet to read.
    Block& b = block;
    unsigned t = b.running->thread;
    return &b.slots[((b.shuffles[t]++ & 1) * b.warps + t / 32) * 32];
}

unsigned emulated_thread() { return block.running->thread; }
unsigned emulated_threads() { return block.threads; }
void* emulated_dynamic_shared() { return block.dynamic; }

// 0, or 1 with a message. The shared variables of a block begin as rubbish.
int run_blocks(void (*call)(void*, void**), void** parameters, const unsigned* grid, const unsigned* size,
               unsigned shared_bytes, int order, unsigned seed, char* message, unsigned long room) {
    Block& b = block;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {size[0], size[1], size[2]};
    b.call = call;
    b.parameters = parameters;
    b.threads = size[0] * size[1] * size[2];
    b.warps = (b.threads + 31) / 32;
    b.order = order;
    b.seed = seed;
    b.sequence.resize(b.threads);
    b.shuffles.assign(b.threads, 0);
    b.slots.assign(b.warps * 64, 0xa5a5a5a5a5a5a5a5ull);
    b.message = message;
    b.room = room;
    std::vector<char> dynamic(shared_bytes + 512);
    b.dynamic = (char*)(((uintptr_t)dynamic.data() + 127) / 128 * 128);
    Found found = {(const void*)call, 0, 0};
    dl_iterate_phdr(find_library, &found);
    char* shared = 0;
    if (found.size) {
        tls_index at = {found.module, 0};
        shared = (char*)__tls_get_addr(&at);
    }
    unsigned long long count = (unsigned long long)grid[0] * grid[1] * grid[2];
    for (unsigned long long i = 0; i < count; ++i) {
        unsigned long long n = order == 1 ? count - 1 - i : i;
        blockIdx = {(unsigned)(n % grid[0]), (unsigned)(n / grid[0] % grid[1]), (unsigned)(n / grid[0] / grid[1])};
        if (shared) memset(shared, 0xa5, found.size);
        memset(dynamic.data(), 0xa5, dynamic.size());
        if (!run_one_block()) return 1;
        for (char* p = b.dynamic + shared_bytes; p < dynamic.data() + dynamic.size(); ++p)
            if (*p != (char)0xa5) { fail("a write beyond the dynamic shared memory of the launch", 0, 0); return 1; }
    }
    return 0;
}

}
