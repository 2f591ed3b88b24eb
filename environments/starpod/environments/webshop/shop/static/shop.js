document.addEventListener("click", (event) => {
  if (event.target.matches('.chip input[type="radio"]')) event.target.parentElement.querySelector("button").click();
});
