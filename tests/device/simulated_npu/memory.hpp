// Memory of the device: pages that the host may neither read nor write, and a second mapping of the same pages that the
// simulation alone uses. Whatever else touches "device" memory gets SIGSEGV. Memory of a freed block is used again by
// its own stream alone, as in torch's caching allocators.
#pragma once
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <bit>
#include <map>
#include <mutex>
#include <vector>

namespace sim {

struct Pages {
  static constexpr size_t SPACE = size_t(1) << 36, LEAST = 64;
  char *device, *host;
  size_t end = 0;
  std::map<std::pair<int64_t, size_t>, std::vector<size_t>> freed;  // offsets by stream and size
  std::mutex lock;

  Pages() {
    device = (char*)mmap(nullptr, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    host = (char*)mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(device != MAP_FAILED && host != MAP_FAILED, "no address space for the devices");
    madvise(host, SPACE, MADV_DONTDUMP);
  }
  static size_t room(size_t bytes) { return std::bit_ceil(std::max(bytes, LEAST)); }
  size_t take(int64_t stream, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    auto& old = freed[{stream, room(bytes)}];
    if (!old.empty()) {
      auto offset = old.back();
      old.pop_back();
      return offset;
    }
    TORCH_CHECK(room(bytes) <= SPACE - end, "out of memory");
    auto offset = end;
    end += room(bytes);
    return offset;
  }
  void give_back(int64_t stream, size_t offset, size_t bytes) {
    std::lock_guard<std::mutex> held(lock);
    freed[{stream, room(bytes)}].push_back(offset);
  }
  void* visible(const void* memory) {  // where the simulation finds it
    if (!memory) return nullptr;
    size_t offset = (char*)memory - device;
    TORCH_CHECK(offset < SPACE, "this is no memory of a device");
    return host + offset;
  }
};

inline Pages& pages() {
  static auto* found = new Pages;  // tensors may outlive the end of the program's statics
  return *found;
}

}  // namespace sim
